package local_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/runtime/local"
)

func Example() {
	list := func(ctx context.Context) (err error) {
		eng, err := local.Open(ctx, local.Options{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, eng.Close()) }()
		sandboxes, err := eng.Sandboxes(ctx)
		for _, sb := range sandboxes {
			fmt.Println(sb.Name, sb.Status)
		}
		return err
	}
	_ = list // as root, on a host with agentbox
}
