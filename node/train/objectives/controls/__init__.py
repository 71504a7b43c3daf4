"""What bounds an update, corrects it or drops a token: small frozen dataclasses, applied in order."""
