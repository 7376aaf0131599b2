"""Passes over an exported program, before it is translated."""
