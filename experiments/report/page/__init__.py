"""The page of a report: one HTML file with its data, its charts and the clients' buffers."""
