"""What a job costs that sums nothing."""
