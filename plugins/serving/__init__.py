"""The servicer that every engine and every contract share."""
