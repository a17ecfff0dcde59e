"""The parts of ``path.py``: a module each, with ``rows()``."""
