"""Small rules with users on several floors."""
