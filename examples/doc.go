// Package examples contains example programs. Unless the list below mentions it, a program needs no network and no
// other service. Run a program with go run ./examples/<name>.
//
//	quickstart   the same load through a plain client and a client with policies
//	httpserver   a server with limits per tenant, a bulkhead and a health endpoint
//	grpc         policies around a gRPC client and in its server
//	cache        a cache for SQLite; with a Redis, in two processes
//	gateway      an LLM gateway: streams, tokens, failover, a cooldown, bills
//	travel       a saga that survives a crash: flights, a hotel, a declined card
//	giveaway     a saga that pays exactly 100.00 while processes are killed
//	outbox       messages that are published if a transaction commits; dead letters
//	consumer     a consumer of NATS or RabbitMQ; it needs a broker
//	observed     metrics for Prometheus, traces by OTLP, a log with trace IDs
//	sagafile     a store of sagas in a file, as a library; go test ./examples/sagafile
//	reload       settings changed under load, from a file on SIGHUP and from Redis
//	temporal     a saga on Temporal: in the test environment of its SDK, or on a server
//
// Package adapter is not a program. Package adapter contains a policy and an adapter as templates for your own code.
package examples
