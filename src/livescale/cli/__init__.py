"""The command line: thin skins over the floors below."""
