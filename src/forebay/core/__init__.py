"""The pure decision core: time and chance are arguments, effects are return values, I/O is somebody else's work."""
