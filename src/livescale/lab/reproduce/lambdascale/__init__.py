"""λScale's claims."""
