"""Load, measurements and reports. Talks HTTP like any client and imports nothing of the server."""
