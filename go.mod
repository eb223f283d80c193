module github.com/go-resilience/resilience

go 1.26.0

require (
	github.com/cenkalti/backoff/v4 v4.3.0
	github.com/go-viper/mapstructure/v2 v2.5.0
	github.com/maypok86/otter/v2 v2.4.0
	github.com/sony/gobreaker/v2 v2.4.0
	github.com/stretchr/testify v1.12.1
	golang.org/x/sync v0.24.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
