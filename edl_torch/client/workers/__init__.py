"""How loader workers reach their trainer."""
