"""Members and gateways: what each does with an order, a message or a layer. Pure rules."""
