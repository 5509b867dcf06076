"""What does each command of `ranktape analyze` take, and which question does it ask? Modules are imported when used."""
