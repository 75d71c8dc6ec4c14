"""The dashboard: reads run directories, and shows them in a browser. It writes nothing into them."""
