"""What scripts/train.py is made of: a training job and its report."""
