"""Tables, charts and the HTML page of finished runs."""
