"""Pictures of measured and predicted figures, as plain SVG."""
