"""The formats that scripts/convert_model.py writes, and the checks of the written files."""
