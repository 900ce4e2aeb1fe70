"""Pictures of plans: as text on a terminal, and as SVG by `gangline.figure`."""
