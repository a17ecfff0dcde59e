"""Jobs of four and more ranks in two and three groups (``bench/four.py``)."""
