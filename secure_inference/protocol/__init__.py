"""Two-party protocols over a channel: the engines and what runs on them."""
