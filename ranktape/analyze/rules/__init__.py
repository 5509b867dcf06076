"""Does a run hold to rules, so that a pipeline of tests may go on?"""
