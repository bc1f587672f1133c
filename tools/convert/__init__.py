"""The forms that scripts/convert_model.py writes, and the check of what was written."""
