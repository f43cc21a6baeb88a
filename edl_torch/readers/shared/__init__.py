"""Arrays and files that all processes of a machine share."""
