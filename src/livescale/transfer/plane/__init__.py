"""The data plane: orders carried out, copies passed on."""
