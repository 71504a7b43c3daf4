"""One file per region of the screen; each widget draws a `NodeView` and keeps no other state."""
