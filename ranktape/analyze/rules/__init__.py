"""Checks a run against rules, so that a pipeline of tests may go on."""
