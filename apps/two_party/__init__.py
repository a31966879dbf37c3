"""Private inference between two machines: scripts to start from. ``deepseal private serve | query`` can do more."""
