"""Plots and the report: what people look at. Views read metrics and answers; nothing below reads views."""
