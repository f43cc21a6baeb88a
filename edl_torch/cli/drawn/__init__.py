"""Page of an audit: one HTML file, which needs no script, no network and no other file."""
