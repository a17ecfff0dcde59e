"""An example of a kernel backend for QSync."""
