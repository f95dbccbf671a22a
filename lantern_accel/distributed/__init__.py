"""Many prompts over many devices: one worker class, and Ray around it (extra ``ray``)."""
