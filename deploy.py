from cluster.launch import main

main()
