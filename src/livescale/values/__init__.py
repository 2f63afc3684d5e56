"""Names and numbers that every floor knows: layers, workers, routes, chunks, policies."""
