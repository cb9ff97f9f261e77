"""Tests against real engines, in processes of their own."""
