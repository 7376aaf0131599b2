"""The formats that an export writes, a module for each."""
