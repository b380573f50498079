"""Answers for data of any size, written in parts and joined at the end."""
