from torch_specops_command import main

main()
