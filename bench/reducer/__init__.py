"""The additions that servers make."""
