"""Reports: runs side by side, projections, plots and pages."""
