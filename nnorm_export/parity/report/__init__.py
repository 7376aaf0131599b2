"""write_report(): a comparison as one HTML page with figures."""
