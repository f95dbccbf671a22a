"""Many prompts over many devices: prompt files, one worker class, and Ray around it (extra ``ray``)."""
