"""The live driver: one gateway owns the pipeline on one event loop, with one armed timer."""
