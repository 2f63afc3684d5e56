"""The data plane: layers move from one worker's arena into another's. No torch, no decisions."""
