"""Keys and credits in a database: what must outlive the process. Imported only when a store is configured."""
