// Package examples holds programs that run offline: go run ./examples/<name>.
//
//	quickstart   the same load through a plain client and through one with policies
//	gateway      an LLM gateway: streams, tokens, failover, a cooldown, bills
//	httpserver   tenants with limits, a bulkhead around a slow part, a health endpoint
//	grpc         policies around a gRPC client and in its server
//	cache        a cache in front of SQLite, and with a Redis in two processes
//	travel       a saga: flights, a hotel, a refused card; it survives a crash
//	giveaway     many processes give away exactly 100.00, whatever is killed
//	observed     metrics for Prometheus, traces by OTLP, a log with the ids of traces
//	outbox       messages that are published if a transaction commits; dead letters
//	consumer     a queue of NATS or RabbitMQ, whose broker must be there
//	reload       settings changed under load, from a file on SIGHUP and from Redis
package examples
