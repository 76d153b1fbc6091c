"""What every request passes: dispatch, bounds, parsing, rendering. Nothing here knows what a cell is stored in."""
