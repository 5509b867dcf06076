"""How is a question put to many records: planned, read once, counted, added up and remembered?"""
