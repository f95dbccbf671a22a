"""Reports: runs side by side, plots and pages."""
