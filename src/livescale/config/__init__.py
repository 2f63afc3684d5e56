"""The pool's configuration: settings as values, and how files and flags become them."""
