// Kubeapiserver is the API server of Kubernetes, for the tests that make engines runs. It is a separate module,
// outside of go.work, because it links 2,000 packages.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() { os.Exit(cli.Run(app.NewAPIServerCommand())) }
