"""The process of a gateway: the Backend behind the HTTP API."""
