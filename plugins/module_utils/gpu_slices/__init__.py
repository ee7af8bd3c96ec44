"""The logic of gpu-slices: pure, typed Python without Ansible imports, one subject a file."""
